from functools import partial

from providers import Remedy, with_parameters

REMEDY = Remedy("multiple of 64", "no limit is sent", partial(with_parameters, max_tokens=None))
