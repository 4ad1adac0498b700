from providers import Remedy, setting

REMEDY = Remedy("multiple of 64", "no limit is sent", setting(max_tokens=None))
