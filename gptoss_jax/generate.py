from .generation import generate as generate
from .generation import stream as stream
