"""The whole loop, small but real: a rollout's FP4 guidance goes through a store and reaches a trainer.

corpus     bytes of Python's own library sources: training text and held-out prompts
model      a Qwen3-MoE of transformers' own class, and the taps where it quantizes
pretrain   under a minute of training, so that activations are those of a trained network
rollout    token-by-token decoding with a KV cache, FP4 codes recorded as they arise
store      a real server process, registration, sealing, bytes on the wire and on disk
trainer    one batched forward over the same tokens, rounded by what was read back
arms       which guidance each compared run gets, negative controls included
metrics    what is counted at a site and over an arm
screen     the tables on the terminal
report     the self-contained HTML page
    plots      its figures
command    ``trace-store demo``
"""
