"""The demo's result as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from html import escape

from trace_client.demo.loop import DemoResult
from trace_client.demo.metrics import ArmResult
from trace_client.demo.plots import figures
from trace_client.demo.screen import excess, headline, layer_cells, share, volumes

STYLE = """
:root { --ink: #1f2937; --muted: #6b7280; --line: #e5e7eb; --good: #16a34a; --bad: #dc2626; }
* { box-sizing: border-box; }
body { margin: 0; background: #f3f4f6; color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 20px 60px; }
h1 { margin: 0 0 6px; font-size: 29px; letter-spacing: -.02em; }
h2 { margin: 0 0 4px; font-size: 17px; }
p { margin: 4px 0 10px; }
.lead { font-size: 17px; max-width: 62em; }
.muted { color: var(--muted); font-size: 13.5px; }
section, .card { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; }
section { margin-top: 18px; overflow-x: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; margin-top: 22px; }
.card b { display: block; font-size: 27px; letter-spacing: -.02em; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 0 18px; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: right; font-weight: 600; color: var(--muted); font-size: 12.5px; padding: 6px 10px;
     border-bottom: 1px solid var(--line); }
td { text-align: right; padding: 6px 10px; border-bottom: 1px solid #f3f4f6; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.best td { background: #f0fdf4; font-weight: 600; }
tr.control td { color: var(--muted); }
.holds::before { content: "\\2713  "; color: var(--good); font-weight: 700; }
.fails::before { content: "\\2717  "; color: var(--bad); font-weight: 700; }
.fails { color: var(--bad); font-weight: 600; }
ul { list-style: none; padding: 0; margin: 6px 0 0; }
pre { margin: 0; white-space: pre-wrap; font-size: 12.5px; color: #374151; }
"""

ARM_COLUMNS = ("arm", "mean |dlogp|", "max |dlogp|", "codes differ", "excess MSE", "record B/token", "wire", "disk")
LAYER_COLUMNS = (
    "layer", "noise", "RTN mismatch", "adjacent", "left", "K, V: noise", "RTN mismatch", "adjacent", "left",
)  # fmt: skip

TERMS = """
|dlogp| is the difference of the sampled tokens' log-probability between trainer and rollout. Codes differ: share of all
FP4 codes (K, V, expert inputs, every layer) that are not the rollout's. Excess MSE: (D_FP4 - D_BF16) / D_BF16, D being
the mean squared difference of what the last layer's experts consume and D_BF16 that of a BF16 rollout and its BF16
trainer; -1 is the floor. Guidance covers K and V of every token and the expert inputs of generated tokens. Record:
codes and block scales. Wire: every byte from the rollout's client to the server, gRPC and HTTP/2 included. Disk: all
files of the run. The differences are those of the CPU kernels between token-by-token decoding and one batched forward;
none is injected.
"""


def render(result: DemoResult) -> str:
    """The page."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>trace-store demo</title><style>{STYLE}</style></head><body><main>
<h1>From an FP4 rollout to the trainer, through the store</h1>
<p class="lead">{escape(headline(result))}</p>
{_cards(result)}
<section><h2>Arms</h2>{_arms_table(result)}<p class="muted">{TERMS}</p></section>
<div class="grid">
{_figures(result)}
</div>
<section><h2>By layer: guided b = 1, whole chain</h2>{_layers_table(result)}
<p class="muted">RTN mismatch: had this arm's own vectors been rounded to nearest under the rollout's scales. Adjacent:
share of those that are one step away. Left: what still differs after guidance.</p></section>
<div class="grid"><section><h2>Checks</h2><ul>{_checks(result)}</ul></section>
<section><h2>What the rollout wrote</h2><pre>{escape(result.sample.decode("utf-8", "replace"))}</pre></section></div>
<section><h2>Run</h2>{_facts(result)}</section>
</main></body></html>
"""


def _cards(result: DemoResult) -> str:
    own, chain, half = result.arm("own_scale"), result.arm("b1"), result.arm("b1_half")
    cards = (
        (f"{own.mean_difference / chain.mean_difference:.1f} x", "closer log-probabilities than plain FP4 training"),
        (share(own.mismatch) + " → " + share(chain.mismatch), "FP4 codes that differ from the rollout's"),
        (
            f"{chain.bytes_per_token:,.0f} B",
            f"guidance per token, whole chain; {half.bytes_per_token:,.0f} B latter half",
        ),
        (f"{result.volumes['full'].disk / result.volumes['b1'].disk:.1f} x", "less disk than full codes"),
    )
    return (
        '<div class="cards">' + "".join(f'<div class="card"><b>{b}</b>{escape(t)}</div>' for b, t in cards) + "</div>"
    )


def _row(cells: tuple[str, ...], style: str = "") -> str:
    return f'<tr class="{style}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _table(columns: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _arms_table(result: DemoResult) -> str:
    return _table(ARM_COLUMNS, [_arm_row(result, arm) for arm in result.arms])


def _arm_row(result: DemoResult, arm: ArmResult) -> str:
    style = "best" if arm.name == "b1" else "control" if arm.title.startswith("control") else ""
    codes = "-" if arm.name == "bf16" else share(arm.mismatch)
    cells = (arm.title, f"{arm.mean_difference:.5f}", f"{arm.max_difference:.3f}", codes, excess(arm.excess))
    return _row((*cells, *volumes(result, arm)), style)


def _layers_table(result: DemoResult) -> str:
    chain = result.arm("b1")
    rows = [
        _row(
            (
                str(layer),
                *layer_cells(chain.over([(layer, "moe_in")])),
                *layer_cells(chain.over([(layer, "k"), (layer, "v")])),
            )
        )
        for layer in range(result.settings.size.layers)
    ]
    return _table(LAYER_COLUMNS, rows)


CAPTIONS = {
    "arms": ("Log-probability difference", "By arm, axis logarithmic. Dashed: BF16 on both sides."),
    "tail": ("How often it is large", "Share of sampled tokens above a difference, both axes logarithmic."),
    "layers": ("Codes that differ", "A missed flip in one layer is noise for all layers and tokens that follow."),
    "noise": ("Noise before rounding", "Relative difference of the expert inputs that trainer and rollout computed."),
    "bytes": ("Volume", "What a token's guidance takes in the record, on the wire and on disk."),
    "loss": ("Training", "The network behind the activations, on Python's own sources, byte by byte."),
}


def _figures(result: DemoResult) -> str:
    drawn = figures(result)
    return "".join(_figure(title, text, drawn[name]) for name, (title, text) in CAPTIONS.items())


def _figure(title: str, text: str, svg: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="muted">{escape(text)}</p>{svg}</section>'


def _checks(result: DemoResult) -> str:
    return "".join(
        f'<li class="{"holds" if check.holds else "fails"}">{escape(check.statement)}</li>' for check in result.checks
    )


def _facts(result: DemoResult) -> str:
    settings, size = result.settings, result.settings.size
    facts = (
        f"Qwen3-MoE, {result.parameters / 1e6:.1f} M parameters: hidden {size.hidden}, {size.layers} layers, "
        f"{size.experts} experts of {size.expert_width}, {size.experts_per_token} per token, {size.heads} heads on "
        f"{size.kv_heads} KV heads of {size.head_dim}. {len(result.losses)} steps, {result.held_out_loss:.2f} nats "
        f"per byte on held-out text. {settings.trajectories} trajectories of {settings.tokens} tokens, "
        f"{settings.prompt_tokens} of them prompt, in microbatches of {settings.microbatch}; seed {settings.seed}. "
        f"NVFP4: weights of the routed experts on both sides; expert inputs, K and V with static tensor scales."
    )
    times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result.seconds.items())
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f'<p>{escape(facts)}</p><p class="muted">{escape(times)}. {escape(versions)}.</p>'
