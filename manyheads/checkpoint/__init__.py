"""A checkpoint of any form: its model, its tokenizer and what belongs to them."""
