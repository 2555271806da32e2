"""What checks every call where CHECK_SHAPES=1: an integer is a number too, as to mypy."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
