"""What a figure's name says of it: whether it is a share, and whether less of it is better."""

SHARES = frozenset(("accuracy", "probe", "exact", "recall@1", "recall@10"))  # written in per cent
LOWER = frozenset(("loss", "perplexity", "bits_per_byte", "nats_per_character", "calibration_error"))
