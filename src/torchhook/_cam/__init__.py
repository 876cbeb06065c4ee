"""Class activation maps. Enter at ``api``; one file for each idea: formulas, the choice of a layer, perturbation."""
