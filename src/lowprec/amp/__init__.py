"""Mixed-precision training for arrays of any library.

Examples
--------
>>> import numpy as np
>>> from lowprec import amp
>>> amp.LossScaler().get_scale()
65536.0
"""

from lowprec.amp import functional
from lowprec.amp.errors import GradientTypeError, ScalerStateError, SettingError
from lowprec.amp.gradients import FormatShares, GradientReport, gradient_report, suggest_scale
from lowprec.amp.rules import ScaleRule
from lowprec.amp.scaler import LossScaler

__all__ = [
    "FormatShares",
    "GradientReport",
    "GradientTypeError",
    "LossScaler",
    "ScaleRule",
    "ScalerStateError",
    "SettingError",
    "functional",
    "gradient_report",
    "suggest_scale",
]
