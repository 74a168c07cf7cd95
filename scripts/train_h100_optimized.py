"""Train the 350M model with the settings of the H100 optimization summary.

python scripts/train_h100_optimized.py [key=value …]
"""

from guide_flags import Defaults, run

# The summary: "500K+ tokens/step", which is 512 × 1024. The plan chooses the micro-batch, as the summary's script does.
SETTINGS = ("train.global_batch=512", "train.warmup_steps=1000", "eval.every=500")

if __name__ == "__main__":
    run(
        "Train the 350M model with the settings of the H100 optimization summary.",
        Defaults(None, None, 6e-4, 1.5, more=SETTINGS),
    )
