"""Reading, describing, auditing and drawing models: the library behind the page, usable without it."""
