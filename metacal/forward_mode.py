from metacal.network import dual_level, plain_attention

__all__ = ["dual_level", "plain_attention"]
