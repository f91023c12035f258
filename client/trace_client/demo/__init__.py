"""The whole loop, small but real: a rollout's FP4 guidance goes through a store and reaches a trainer.

corpus     bytes of Python's own library sources: training text and held-out prompts
model      a Qwen3-MoE of transformers' own class, and the taps where it quantizes
pretrain   under a minute of training, so that activations are those of a trained network
muon       the optimizer of that minute
rollout    token-by-token decoding with a KV cache, FP4 codes recorded as they arise
store      a real server process and the runs registered with it
meter      a relay that counts the bytes on the wire
trainer    one batched forward over the same tokens, rounded by what was read back
arms       which guidance each compared run gets, negative controls included
metrics    what is counted at a site and over an arm
loop       all of it in order
screen     progress and tables on the terminal
plots      figures
report     the self-contained HTML page
command    ``trace-store demo``
"""
