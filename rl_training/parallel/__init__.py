"""The processes that train together: which entries of the parameters each keeps, and vectors of them."""
