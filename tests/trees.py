"""A sentence and its tree, in the form that Universal Dependencies come in."""


def conllu(*sentences):
    """Lines of ten columns; of each word its number, itself, its head and what it is to that."""
    lines = []
    for words in sentences:
        lines += [
            "# a comment",
            *("\t".join((number, word, *"____", head, *(more or "_"), *"__")) for number, word, head, *more in words),
            "",
        ]
    return "\n".join(lines)


SHE = [
    ("1", "She", "2", "nsubj"),
    ("2", "sees", "0", "root"),
    ("3-4", "cannot", "_"),
    ("3", "can", "2", "aux:can"),
    ("4", "not", "3", "advmod"),
    ("4.1", "ghost", "_"),
    ("5", "10 000", "2", "obj"),
]
