"""Where the gamma of the focal loss comes from.

A gamma source is a module called as

    gamma = source(features, logits=logits, labels=labels, inputs=inputs, epoch=epoch)

with the batch's penultimate features `(N, D)`, its logits `(N, K)`, labels `(N,)`, network inputs `(N, ...)` and the
epoch, a number. It returns one gamma per sample `(N,)` or one for all, a 0-d tensor. Each source reads what it needs
and ignores the rest; none of them sends a gradient back into the backbone. Optional attributes complete it:

- `observe(features, ...)`, same arguments: called once for every training batch, before the source is; running
  statistics live here, so that evaluating a source never changes it;
- `reads_inputs`: whether `observe` reads the inputs. Where several ranks have parts of a batch, it is given the
  features, logits and labels of all of them, and the inputs, which are far more, only if this is true;
- `settle()`: called after each step of its parameters, to keep them where they can act;
- `layer`: the name of a module of the backbone whose output, pooled to `(N, D)`, is passed as the features.

`LearnedSmoothing` has the same interface and gives the α of `losses.label_smoothing` in place of a gamma.
"""

from metacal.gamma.adafocal import AdaFocal, AdaFocalOptions
from metacal.gamma.bounds import cap, uncap
from metacal.gamma.curve import CurveGamma, CurveOptions
from metacal.gamma.fixed import (
    FLSD,
    FixedGamma,
    FixedOptions,
    FLSDOptions,
    StepGamma,
    StepOptions,
    flsd_gamma,
)
from metacal.gamma.learned import (
    INPUTS,
    GammaNet,
    GammaNetOptions,
    LearnedSmoothing,
    ScalarGamma,
    ScalarOptions,
    SmoothingOptions,
    pool,
)
from metacal.gamma.options import Around, SourceOptions

__all__ = [
    "FLSD",
    "INPUTS",
    "SOURCES",
    "AdaFocal",
    "Around",
    "CurveGamma",
    "FixedGamma",
    "GammaNet",
    "LearnedSmoothing",
    "ScalarGamma",
    "SmoothingOptions",
    "SourceOptions",
    "StepGamma",
    "cap",
    "flsd_gamma",
    "pool",
    "uncap",
]

SOURCES: dict[str, type[SourceOptions]] = {
    "fixed": FixedOptions,
    "flsd": FLSDOptions,
    "step": StepOptions,
    "adafocal": AdaFocalOptions,
    "scalar": ScalarOptions,
    "curve": CurveOptions,
    "gamma_net": GammaNetOptions,
}
"""By the name that a configuration gives: dataclasses like `SourceOptions`, whose `build` makes the source."""
