"""Backbones: images to logits, and the wrapper that also returns the penultimate features."""

from __future__ import annotations

from metacal.models.backbone import Backbone
from metacal.models.factory import build_model, model_names

__all__ = ["Backbone", "build_model", "model_names"]
