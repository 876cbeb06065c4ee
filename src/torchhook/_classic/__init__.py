"""The names that hook code has long been written with, as façades over ``Session``: nothing but the interface."""
