"""The probes, one file each: the formula with its source, the pure functions and the class that calls them.

simple.py, measured.py         what a step is predicted to do, and what it has done
interventions.py               what other steps would do; token_classes.py: which tokens do it
ground_truth.py                the change on fresh responses; covariance.py: a simpler predictor beside it
gns.py, ess.py, sampler.py     the gradient's noise, weights of responses, and whether the policy drew them

What a single probe needs has a file of its own beside it: trapezoid.py for simple.py, previous_policy.py and
running_sum.py for measured.py, top_tokens.py for token_classes.py, advantage_covariance.py for covariance.py,
fresh_sample.py and importance.py for ground_truth.py. The last three serve checkpoint analyses too.
"""

from rl_training.engine.probe import Probe
from rl_training.probes.covariance import CovariancePredictorProbe as CovariancePredictorProbe
from rl_training.probes.ess import EffectiveSampleSizeProbe as EffectiveSampleSizeProbe
from rl_training.probes.gns import GradientNoiseScaleProbe as GradientNoiseScaleProbe
from rl_training.probes.ground_truth import GroundTruthProbe as GroundTruthProbe
from rl_training.probes.interventions import InterventionsProbe as InterventionsProbe
from rl_training.probes.measured import MeasuredStepProbe as MeasuredStepProbe
from rl_training.probes.sampler import SamplerProbe as SamplerProbe
from rl_training.probes.simple import SimpleEntropyProbe as SimpleEntropyProbe
from rl_training.probes.token_classes import TokenClassesProbe as TokenClassesProbe

BUILT_IN: dict[str, type[Probe]] = {
    probe.name: probe
    for probe in (
        SimpleEntropyProbe, InterventionsProbe, MeasuredStepProbe, TokenClassesProbe, GroundTruthProbe,
        GradientNoiseScaleProbe, SamplerProbe, EffectiveSampleSizeProbe, CovariancePredictorProbe,
    )
}  # fmt: skip
