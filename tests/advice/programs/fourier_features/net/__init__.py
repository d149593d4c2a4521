from net.regressor import Regressor

__all__ = ["Regressor"]
