"""The optimizer's step as a formula: from states and a gradient to the change of the parameters."""
