"""Smallest whole loop: a rollout worker stores guidance for one trajectory, a trainer rank reads it by microbatch.

trace-store serve --data /tmp/trace-store-data &
python examples/rollout_to_trainer.py 127.0.0.1:7077
"""

from __future__ import annotations

import sys

import numpy as np

import trace_client
from trace_store import Site, codebook

WIDTH, LAYERS, PROMPT, TOKENS = 512, 4, 16, 96


def main(target: str) -> None:
    sites = [Site(layer, "moe_in", WIDTH) for layer in range(LAYERS)]
    random = np.random.default_rng(0)
    rollout = {site: random.standard_normal((TOKENS - 1, WIDTH), np.float32) for site in sites}
    trainer = {site: x + 0.002 * random.standard_normal(x.shape, np.float32) for site, x in rollout.items()}

    with trace_client.connect(target) as client:
        client.register("example", sites)

        # Rollout side: what the engine's FP4 quantizer produced, packed to one bit a value.
        records = {}
        for site, x in rollout.items():
            codes, scales, decode_scale = codebook.quantize(x, format=site.format)
            records[site] = (codebook.pack(codes, bits=1), scales, decode_scale)
        with client.writer("example", "step-1") as writer:
            writer.append("prompt-0/sample-0", 0, records, policy_version=1)
            receipt = writer.seal("prompt-0/sample-0", tokens=TOKENS, prompt_tokens=PROMPT)
        print(f"sealed {receipt.tokens} tokens, {receipt.durability}, segments {', '.join(receipt.segments)}")

        # Trainer side: rows of one microbatch, read ahead, guide the rounding of the trainer's own activations.
        reader = client.reader("example", "step-1")
        microbatches = [
            [("prompt-0/sample-0", start, min(start + 32, TOKENS - 1))] for start in range(0, TOKENS - 1, 32)
        ]
        differ = {"round to nearest": 0, "guided": 0}
        for number, batch in enumerate(reader.prefetch(microbatches)):
            for site in sites:
                assert batch.valid[site].all(), batch.missing
                tokens = slice(32 * number, 32 * number + batch.rows)
                x, scale = trainer[site][tokens], batch.tensor_scales[site]
                truth = codebook.rtn_round(rollout[site][tokens], batch.scales[site], scale, format=site.format)
                nearest = codebook.rtn_round(x, batch.scales[site], scale, format=site.format)
                guided = codebook.guided_round(
                    x, batch.planes[site], batch.scales[site], scale, format=site.format, bits=1
                )
                differ["round to nearest"] += int((nearest != truth).sum())
                differ["guided"] += int((guided != truth).sum())
        total = LAYERS * (TOKENS - 1) * WIDTH
        for name, count in differ.items():
            print(f"{name:>16}: {count} of {total} values differ from the rollout's")
        client.release("example", "step-1")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7077")
