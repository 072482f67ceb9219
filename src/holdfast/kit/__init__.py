"""For code inside a sandbox, and outside of any: what helps a long run to survive its own end.

>>> from holdfast import kit
>>> kit.save("part-000.parquet", step="part 0")  # doctest: +SKIP
"""

from holdfast.kit.saving import SaveRefused, save

__all__ = ["SaveRefused", "save"]
