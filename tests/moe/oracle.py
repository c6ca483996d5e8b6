"""Algorithm 1 of the paper, transcribed line by line: one token after the other, in numpy."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Routed:
    """Each choice as [S, 2] arrays, first and second; weights are 0 where a choice is not kept."""

    expert: np.ndarray
    position: np.ndarray
    kept: np.ndarray
    weight: np.ndarray
    aux: float  # line 13 to the letter: 1/E^2 when balanced


def algorithm_1(logits_SE, capacity, rnd_S, valid_S, routing):
    """Routes one group. ``rnd_S`` holds the uniform numbers of line 17; -1 makes every coin say yes.

    Tokens that are not valid are skipped. ``lingvo`` skips line 22 where the coin said no.
    """
    logits_SE = np.asarray(logits_SE, np.float32)
    S, E = logits_SE.shape
    c_E = np.zeros(E, int)  # line 1
    exp_SE = np.exp(logits_SE - logits_SE.max(-1, keepdims=True))
    g_SE = exp_SE / exp_SE.sum(-1, keepdims=True)  # line 2
    tokens = max(valid_S.sum(), 1)
    m_E = g_SE[valid_S].sum(0) / tokens  # line 3
    result = Routed(np.zeros((S, 2), int), np.zeros((S, 2), int), np.zeros((S, 2), bool), np.zeros((S, 2)), 0.0)

    def top_2(s):
        order = np.argsort(-logits_SE[s], kind="stable")
        e1, e2 = order[0], order[1]
        return g_SE[s, e1], e1, g_SE[s, e2], e2

    for s in range(S):  # line 4
        if not valid_S[s]:
            continue
        g1, e1, g2, e2 = top_2(s)  # line 5
        g1 = g1 / (g1 + g2)  # line 6
        c = c_E[e1]  # line 7
        if c < capacity:  # line 8
            result.kept[s, 0], result.weight[s, 0] = True, g1  # line 9
        result.expert[s, 0], result.position[s, 0] = e1, c
        c_E[e1] = c + 1  # line 11
    result.aux = float(np.mean(c_E / tokens * m_E))  # line 13
    for s in range(S):  # line 14
        if not valid_S[s]:
            continue
        g1, e1, g2, e2 = top_2(s)  # line 15
        g2 = g2 / (g1 + g2)  # line 16
        rnd = rnd_S[s]  # line 17
        c = c_E[e2]  # line 18
        if c < capacity and 2 * g2 > rnd:  # line 19
            result.kept[s, 1], result.weight[s, 1] = True, g2  # line 20
        result.expert[s, 1], result.position[s, 1] = e2, c
        if routing == "paper" or 2 * g2 > rnd:
            c_E[e2] = c + 1  # line 22
    return result
