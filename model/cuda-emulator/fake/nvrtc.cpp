// A fake NVRTC: g++ compiles programs for the fake driver, with the flags of the emulator.
//
// FAKE_DIR is the folder of this file.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

enum { SUCCESS = 0, INVALID_OPTION = 5, COMPILATION = 6, INTERNAL_ERROR = 11 };

struct Program {
    std::string name, text, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
};

API nvrtcVersion(int* major, int* minor) {
    *major = 12, *minor = 9;
    return SUCCESS;
}
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR"; }
API nvrtcCreateProgram(Program** program, const char* text, const char* name, int num_headers, const char* const* headers,
                       const char* const* names) {
    *program = new Program{name, text, "", "", {}};
    for (int i = 0; i < num_headers; ++i) (*program)->headers.emplace_back(names[i], headers[i]);
    return SUCCESS;
}
API nvrtcDestroyProgram(Program** program) {
    delete std::exchange(*program, nullptr);
    return SUCCESS;
}
API nvrtcCompileProgram(Program* program, int num_options, const char* const* options) {
    char made[] = "/tmp/fake-nvrtc-XXXXXX";
    if (!mkdtemp(made)) return INTERNAL_ERROR;
    std::string dir = made, file = dir + "/" + program->name;
    for (auto& [name, text] : program->headers) std::ofstream(dir + "/" + name) << text;
    std::ofstream(file) << program->text << "\n#include \"module.h\"\n";
    // Every module has its own copy of what a header defines.
    std::string command = "g++ -shared -fPIC -std=c++17 -O1 -w -fno-gnu-unique -fvisibility=hidden -ffp-contract=off "
                          "-DBATON_EMULATED -I" FAKE_DIR " -I" FAKE_DIR "/../cpp -I" + dir;
    bool is_known = false;
    for (int i = 0; i < num_options; ++i) {
        std::string option = options[i];
        is_known |= option == "--gpu-architecture=sm_90a";
        if (option.rfind("-D", 0) == 0) command += " " + option;
    }
    if (!is_known) {
        program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)";
        return INVALID_OPTION;
    }
    command += " -x c++ " + file + " -o " + dir + "/code 2> " + dir + "/log";
    int status = system(command.c_str());
    auto read = [&](const char* name) {
        std::stringstream all;
        all << std::ifstream(dir + name, std::ios::binary).rdbuf();
        return all.str();
    };
    program->log = read("/log");
    if (status == 0) program->code = read("/code");
    bool is_gone = system(("rm -r " + dir).c_str()) == 0;
    return status != 0 ? COMPILATION : is_gone ? SUCCESS : INTERNAL_ERROR;
}
API nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return SUCCESS;
}
API nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}
API nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->code.size();
    return SUCCESS;
}
API nvrtcGetCUBIN(Program* program, char* code) {
    memcpy(code, program->code.data(), program->code.size());
    return SUCCESS;
}
