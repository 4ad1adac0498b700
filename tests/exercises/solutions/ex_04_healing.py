from providers import Remedy


def in_steps_of_64(body):
    return {**body, "max_tokens": body["max_tokens"] // 64 * 64}


REMEDY = Remedy(
    "max_tokens must be a multiple of 64", "max_tokens goes in steps of 64", in_steps_of_64
)
