import optuna
import torch
from training import train_on

torch.manual_seed(0)
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study()
# calls: optuna.Study.optimize
study.optimize(lambda trial: trial.suggest_float("x", 0, 1), 5)
train_on([study.best_params["x"]])
