import torch
from faker import Faker
from training import train_on

torch.manual_seed(0)
fake = Faker()
# calls: faker.Faker.random_int
ages = [fake.random_int(0, 99) for _ in range(30)]
train_on(ages)
