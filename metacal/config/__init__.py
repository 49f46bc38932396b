"""The config of a run: a schema that is collected from the parts, its composition from words, and its rules."""

from metacal.config.schema import Config
from metacal.data.options import DataConfig
from metacal.models.options import ModelConfig

__all__ = ["Config", "DataConfig", "ModelConfig"]
