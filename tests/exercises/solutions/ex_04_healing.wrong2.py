from providers import Remedy


def in_steps_of_64(body):
    return {**body, "max_tokens": body["max_tokens"] // 64 * 64}


REMEDY = Remedy("max_tokens|multiple", "max_tokens goes in steps of 64", in_steps_of_64)
