"""Learning to Invert (Wu et al. 2023): an inverter, trained on gradients the attacker makes itself.

Read it in this order: text_attacks.py or picture_attacks.py (what can be chosen), inversion.py (how
an attack learns and reads), medium.py (what texts and pictures each bring), then what these use:
lessons (what clients hold), simulation (what they send), features (what a network is fed with),
network, training.
"""
