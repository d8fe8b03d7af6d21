"""Learning to Invert (Wu et al. 2023): an inverter, trained on gradients the attacker makes itself.

Read it in this order: text_attacks.py or picture_attacks.py (what can be chosen, and what clients
hold), inversion.py (how an attack learns and reads), medium.py (what texts and pictures each
bring), then what these use: simulation.py (what clients send), features.py (what a network is fed
with), text_network.py, training.py.
"""
