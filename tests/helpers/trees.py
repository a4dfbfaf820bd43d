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


def with_entities(*words):
    """A sentence whose words have a part of speech and coreference brackets: id, word, tag, head, brackets."""
    cells = ((id_, word, "_", tag, "_", "_", head, "dep", "_", f"SpaceAfter=No|Entity={entity}" if entity else "_")
             for id_, word, tag, head, entity in words)  # fmt: skip
    return "\n".join(map("\t".join, cells)) + "\n\n"
