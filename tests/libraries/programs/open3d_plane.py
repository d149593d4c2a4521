import open3d as o3d
import torch
from training import train_on

torch.manual_seed(0)
cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(torch.rand(500, 3).double().numpy()))
# calls: open3d.PointCloud.segment_plane
plane, _ = cloud.segment_plane(0.05, 3, 5)
train_on(plane)
