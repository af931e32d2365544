# SPDX-License-Identifier: Apache-2.0
"""LeRobot's flow-matching policies as stochastic policies: sampling with log-probabilities, values and entropy."""
