from study.records import Patient


def train_and_test(patients: list[Patient], share: float = 0.8):
    by_key = {patient.key: patient for patient in patients}
    keys = sorted(by_key)
    cut = int(len(keys) * share)
    return [by_key[key] for key in keys[:cut]], [by_key[key] for key in keys[cut:]]
