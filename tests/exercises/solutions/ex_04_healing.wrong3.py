from functools import partial

from providers import Remedy, with_parameters

REMEDY = Remedy(
    "max_tokens must be a multiple of 64",
    "max_tokens is 64",
    partial(with_parameters, max_tokens=64),
)
