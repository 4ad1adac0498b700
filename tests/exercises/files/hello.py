"""A program with a mistake."""


def greet(name):
    # TODO: greet people without a name, too
    return f"Hello, {name[:-1]}!"


print(greet("class"))
