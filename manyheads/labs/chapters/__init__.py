"""The labs, one file per chapter of the claims."""
