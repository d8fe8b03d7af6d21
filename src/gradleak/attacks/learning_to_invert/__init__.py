"""Learning to Invert (Wu et al. 2023): an inverter trained on gradients that the attacker makes itself, defense included."""
