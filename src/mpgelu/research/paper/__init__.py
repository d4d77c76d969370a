"""The experiments of the paper: their records, and the tables made from them."""
