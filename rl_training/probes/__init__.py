"""The probes: one file each, with its formula's source, the pure function and the class that feeds it."""

from rl_training.probes.covariance import CovariancePredictorProbe
from rl_training.probes.error_shares import ErrorSharesProbe
from rl_training.probes.ess import EffectiveSampleSizeProbe
from rl_training.probes.gns import GradientNoiseScaleProbe
from rl_training.probes.ground_truth import GroundTruthProbe
from rl_training.probes.interventions import InterventionsProbe
from rl_training.probes.responses import ResponsesProbe
from rl_training.probes.simple import SimpleEntropyProbe
from rl_training.probes.token_classes import TokenClassesProbe

__all__ = [
    "CovariancePredictorProbe",
    "EffectiveSampleSizeProbe",
    "ErrorSharesProbe",
    "GradientNoiseScaleProbe",
    "GroundTruthProbe",
    "InterventionsProbe",
    "ResponsesProbe",
    "SimpleEntropyProbe",
    "TokenClassesProbe",
]
