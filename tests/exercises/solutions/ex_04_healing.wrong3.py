from providers import Remedy, setting

REMEDY = Remedy(
    "max_tokens must be a multiple of 64",
    "max_tokens is 64",
    setting(max_tokens=64),
)
