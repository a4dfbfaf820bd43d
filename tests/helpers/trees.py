"""A sentence with its dependency tree, in the CoNLL-U format of Universal Dependencies."""


def conllu(*sentences):
    """Lines of ten columns, of which each word fills four: id, word, head, relation."""
    lines = []
    for words in sentences:
        cells = ((id_, word, *"____", head, *(relation or "_"), *"__") for id_, word, head, *relation in words)
        lines += ["# a comment", *map("\t".join, cells), ""]
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
