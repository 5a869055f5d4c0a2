"""The specification, in numpy: one file a concept, one function a formula, named as the operator it specifies."""
