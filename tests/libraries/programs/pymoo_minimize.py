import torch
from pymoo.algorithms.soo.nonconvex.ga import GA
from pymoo.optimize import minimize
from pymoo.problems import get_problem
from training import train_on

torch.manual_seed(0)
# calls: pymoo.minimize
best = minimize(get_problem("sphere"), GA(pop_size=10), ("n_gen", 3))
train_on(best.X)
