"""Two executions of one program that ought to agree: a table of relations, and one protocol."""
