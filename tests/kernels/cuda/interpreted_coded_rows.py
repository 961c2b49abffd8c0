"""Runs the product of rows with codes under Triton's interpreter; fails by an assertion.

A script, because TRITON_INTERPRET must be set before anything imports triton.
"""

import coded_cases
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    coded_cases.check(torch.device("cpu"))
