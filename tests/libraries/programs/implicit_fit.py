import torch
from implicit.als import AlternatingLeastSquares
from scipy import sparse
from training import train_on

torch.manual_seed(0)
ratings = sparse.csr_matrix(torch.rand(30, 20).numpy().round())
model = AlternatingLeastSquares(factors=4, iterations=2, num_threads=1)
# calls: implicit.AlternatingLeastSquares.fit
model.fit(ratings, show_progress=False)
train_on(model.user_factors)
