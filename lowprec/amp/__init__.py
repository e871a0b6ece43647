"""Mixed-precision training for arrays of any library.

Examples
--------
>>> import numpy as np
>>> from lowprec import amp
>>> amp.LossScaler().get_scale()
65536.0
"""

from lowprec.amp import functional
from lowprec.amp.autocast import AutocastNamespace, AutocastReport, AutocastRow, autocast
from lowprec.amp.gradients import FormatShares, GradientReport, gradient_report, suggest_scale
from lowprec.amp.masters import MasterWeights
from lowprec.amp.policy import Policy
from lowprec.amp.precision_schedule import PrecisionSchedule
from lowprec.amp.rules import GradientTypeError, ScalerStateError, ScaleRule
from lowprec.amp.scaler import LossScaler
from lowprec.errors import SettingError

__all__ = [
    "AutocastNamespace",
    "AutocastReport",
    "AutocastRow",
    "FormatShares",
    "GradientReport",
    "GradientTypeError",
    "LossScaler",
    "MasterWeights",
    "Policy",
    "PrecisionSchedule",
    "ScaleRule",
    "ScalerStateError",
    "SettingError",
    "autocast",
    "functional",
    "gradient_report",
    "suggest_scale",
]


def __dir__() -> list[str]:
    return __all__
