"""What is measured, and on which test images."""

from __future__ import annotations

PROTOCOLS = ("global", "matched", "label_set")
METRICS = ("accuracy", "balanced_accuracy", "macro_auc", "macro_f1", "ece")
CHOICES = ("accuracy", "balanced_accuracy", "macro_auc")  # a verdict may go by
