import igraph
import leidenalg
import torch
from training import train_on

torch.manual_seed(0)
graph = igraph.Graph(300, [(i, i * j % 300) for i in range(300) for j in (3, 7, 11)])
# calls: leidenalg.find_partition
found = leidenalg.find_partition(graph, leidenalg.ModularityVertexPartition)
train_on(found.membership)
