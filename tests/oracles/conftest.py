"""Oracles: other people's code, run on our weights. `pytest -m "not oracle"` leaves them out."""


def pytest_configure(config):
    config.addinivalue_line("markers", "oracle: compares with other people's code; needs the oracle packages")
