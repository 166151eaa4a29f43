"""One device: the MXFP4 format, routing, and the fast operations. Imports nothing of the model.

Each operation is a package: `__init__` is the only door (one public function with `backend=`),
`reference` is its definition, the other files are faster forms tested against it.
"""
