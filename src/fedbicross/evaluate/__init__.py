"""How a run is judged: protocols, metrics, summaries and costs. Submodules load on first use (numpy costs time)."""

from __future__ import annotations

from fedbicross._lazy import lazy_submodules

PROTOCOLS = ("global", "matched", "label_set")
METRICS = ("accuracy", "balanced_accuracy", "macro_auc", "macro_f1", "ece")

__getattr__ = lazy_submodules(
    __name__, ("costs", "generation_costs", "metrics", "mmd", "protocols", "reconstruction", "summary")
)
