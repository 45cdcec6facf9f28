"""Draws docs/algorithms.png, what each policy loss makes of a token, as a function of its ratio;
and writes the table of flags in docs/algorithms.md.

    python docs/draw_algorithms.py

The curves are computed by autograd from the functions of algos.py themselves, and the table is what
those functions were registered with.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import algos  # noqa: E402
from plumbing.settings import Settings, owners  # noqa: E402

PAGE = HERE / "algorithms.md"
BEGIN, END = "<!-- flags: written by draw_algorithms.py -->\n", "<!-- end of flags -->\n"

RATIOS = torch.logspace(-1, 1, 801, dtype=torch.float64)
PANELS = [  # title, loss, where pi_prox is, other settings
    ("pg", "pg", "pi", {}),
    ("ppo", "ppo", "pi", {}),
    ("ppo, dual_clip 2", "ppo", "pi", {"dual_clip": 2.0}),
    ("decoupled_ppo: the clip\n(pi_prox = pi_b)", "decoupled_ppo", "pi_b", {}),
    ("decoupled_ppo: the weight\n(pi_prox = pi)", "decoupled_ppo", "pi", {}),
    ("tis", "tis", "pi", {}),
    ("cispo", "cispo", "pi", {}),
    ("topr", "topr", "pi", {}),
    ("wtopr (1 and 0.5)", "wtopr", "pi", {}),
    ("gspo, of one token", "gspo", "pi", {}),
    ("kimi: with its pull", "kimi", "pi", {}),
    ("kimi, kimi_tau 0.5", "kimi", "pi", {"kimi_tau": 0.5}),
]


def weight(loss: str, proximal: str, sign: float, flags: dict) -> torch.Tensor:
    """-(d loss / d log pi) / A for every ratio, with A = sign, R = 1 if it is good, else 0."""
    logp = RATIOS.log().requires_grad_()  # pi_b = 1
    tokens = algos.Tokens(
        logp=logp,
        behaviour=torch.zeros_like(RATIOS),
        proximal=logp.detach() if proximal == "pi" else torch.zeros_like(RATIOS),
        advantage=torch.full_like(RATIOS, sign),
        reward=torch.full_like(RATIOS, float(sign > 0)),
        sample=torch.arange(len(RATIOS)),
    )
    value, _ = algos.LOSSES[loss](tokens, Settings(loss=loss, **flags))
    value.sum().backward()
    return -logp.grad / sign


def table() -> str:
    """The flags that losses, advantages and aggregations bring along, in Markdown."""
    lines = ["| flag | default | of | what it is |", "|---|---|---|---|"]
    for flag, (kind, names) in owners().items():
        field = algos.KINDS[kind][names[0]].flags[flag]
        of = ", ".join(f"`{name}`" for name in names)
        text = field.metadata["help"].replace("|A|", "abs(A)")
        lines.append(f"| `--{flag}` | {field.default:g} | {of} | {text} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """docs/algorithms.md with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def main(target: Path = HERE / "algorithms.png") -> None:
    PAGE.write_text(page(PAGE.read_text()))
    figure, axes = plt.subplots(3, 4, figsize=(12, 8), sharex=True, sharey=True)
    for axis, (title, loss, proximal, flags) in zip(axes.flat, PANELS, strict=True):
        for sign, colour, style, label in (
            (1.0, "tab:green", "-", "A > 0 (R > 0): made more likely"),
            (-1.0, "tab:red", "--", "A < 0 (R = 0): made less likely"),
        ):
            y = weight(loss, proximal, sign, flags)
            axis.plot(RATIOS, y, style, color=colour, linewidth=2, label=label)
        axis.axvline(1, color="0.8", zorder=0)
        axis.axhline(1, color="0.8", zorder=0)
        axis.set(xscale="log", xlim=(0.1, 10), ylim=(-0.15, 3), title=title)
        axis.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
        axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("r = pi / pi_b")
    for axis in axes[:, 0]:
        axis.set_ylabel("weight of the gradient")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main()
